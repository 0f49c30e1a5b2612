"""A course made from the lessons: assignments with points, graded by their properties.

assignment  source to nbgrader's notebooks          door, reading, repair  what students hand in, made fit to be graded
points      how many for what                       grading                the properties of one submission
circle      make, collect, autograde, and so on     marking, gradebook     marks into notebooks, rows, a CSV
questions   the bank, and quizzes from it           objectives             what each is shown by
slides      from a lesson's source                  bundle                 an installation without a network
"""
